# engine: the variables that are set for the engine, by these lines or by you. They have to be the same on every rank.
#   Those named @@{of_one_node} are left out: each node has its own.
names=(
  @@{engine_rows}
)
engine=()
for name in "${names[@]}"; do
  case "$name" in
    @@{of_one_node_pattern}) ;;
    *) if [[ -v $name ]]; then engine+=("$name"); fi ;;
  esac
done
