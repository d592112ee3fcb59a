@@{step} \
  env DEEPSEEK_TRITON_LAUNCH="$tag" @@{start} &
server=$!
# At SIGTERM srun kills its tasks at once (Slurm 22.05), so the supervisor is told instead: again and again, because it may not run yet.
stop() {
  while kill -0 "$server" 2> /dev/null; do
    @@{stop} "$tag" > /dev/null || true
    sleep 1
  done
}
trap 'stop &' TERM
# A signal interrupts wait.
while kill -0 "$server" 2> /dev/null; do wait "$server" || true; done
wait "$server"
