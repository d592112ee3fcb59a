# The guard ends the server when the supervisor is killed.
start=(
  python3 "$supervise" run "${options[@]}" --
  python3 "$supervise" rank --
  "${server[@]}"
)
