# INTERFACE is the network interface over which the ranks reach each other. Set it when Open MPI, NCCL or Gloo chooses a
#   wrong one, such as the bridge of a container. It changes no variable that is already set for one of them.
interface=()
if [[ -n "${INTERFACE:-}" ]]; then
  export NCCL_SOCKET_IFNAME="${NCCL_SOCKET_IFNAME:-$INTERFACE}"
  export GLOO_SOCKET_IFNAME="${GLOO_SOCKET_IFNAME:-$INTERFACE}"
  for parameter in btl_tcp_if_include oob_tcp_if_include; do
    own="OMPI_MCA_$parameter"
    if [[ -z "${!own:-}" ]]; then interface+=(-mca "$parameter" "$INTERFACE"); fi
  done
fi
