refused=
refuse() {
  echo "@@{script}: $1" >&2
  refused=1
}
