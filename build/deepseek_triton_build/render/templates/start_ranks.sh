#include ranks.sh
#if several_nodes
options+=(--hosts "$(IFS=,; echo "${hosts[*]}")")
#end
start=(
  python3 "$supervise" run "${options[@]}" --
  "${ranks[@]}"
  python3 "$supervise" rank --
  @@{launch} "${server[@]}"
)
