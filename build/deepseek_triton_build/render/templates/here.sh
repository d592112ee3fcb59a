here="$(CDPATH="" cd -- "$(dirname -- "$(readlink -f -- "${BASH_SOURCE[0]}")")" && pwd)"
#if files
# Programs look for the files that the YAML names from the folder where they were started.
text="$(<"$here/extra-llm-api-config.yml")"
text="${text//': @@{files}'/": '$here/@@{files}'"}"
config="$(mktemp -d)"
printf "%s\n" "$text" > "$config/extra-llm-api-config.yml"
#end
#include exports.sh
