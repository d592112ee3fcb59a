#if exports
keeps() {
  if [[ "${!1}" != "$2" ]]; then
    echo "@@{script}: note: $1=${!1} is kept, as it was set before; the plan has $2" >&2
  fi
}
@@{exports}
#end
