# A ConfigMap is mounted as links into a folder that is exchanged as a whole. Triton and mpirun get plain files, at the same path in every pod; what begins with a dot is that folder.
cp -rL @@{mounted}/* @@{repository}/
