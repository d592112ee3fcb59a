# A ConfigMap is mounted as links into a hidden folder, which Kubernetes replaces as a whole. Triton and mpirun need plain files at the same path in every pod, so they are copied; * leaves the hidden folder out.
cp -rL @@{mounted}/* @@{repository}/
