# @@{world_size} GPUs are @@{nodes} nodes of @@{gpus_per_node}. HOSTS names the nodes, separated by commas, this node
#   first. Each node has this folder and the checkpoint at the same path, and accepts ssh from the others without a
#   password. SSH_PORT is the port of ssh when it is not 22; SSH_ARGS are further arguments of ssh. The variables of the
#   engine that are set here are set on the other nodes too. Under Slurm, every rank runs this script instead, without
#   HOSTS: srun --mpi=pmix --nodes @@{nodes} --ntasks-per-node @@{gpus_per_node} ./@@{script}
