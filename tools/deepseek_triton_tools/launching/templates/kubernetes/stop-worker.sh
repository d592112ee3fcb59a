while true; do
  running=
  for file in /proc/[0-9]*/comm; do
    { read -r name < "$file"; } 2> /dev/null || continue
    # The daemon of mpirun: orted in Open MPI 4, prted in Open MPI 5.
    case $name in orted | prted) running=yes ;; esac
  done
  if [[ -z $running ]]; then exit 0; fi
  sleep 1
done
