# The name for docker stop, logs and exec.
docker run --name @@{name}
# It is a container of this project.
#if has_triton
# launch list asks the supervisor in it by this.
#end
--label @@{supervisor_label}
#if is_removed
# The name is free again once the container has ended.
--rm
#end
#if restart
# As requested.
--restart @@{restart}
#end
#if detach
# The container runs in the background; docker logs shows its output.
--detach
#end
#if has_triton
# docker stop must not kill before the supervisor does. Open requests get all but 5 s of @@{exit_timeout_s} s (EXIT_TIMEOUT), at least half, the supervisor kills what is left after @@{supervisor_kill_s} s, @@{mpirun_kill}and some seconds are to spare. With docker's default of 10 s answers would be cut short.
#else
# Process 1 is docker's own: it hands signals on, and reaps what ended. docker stop kills what still runs after this time, as the programs of a large model may need more than docker's 10 s to end.
--init
#end
--stop-timeout @@{stop_timeout_s}
#if gpus
# @@{planned}all takes every GPU of the machine; --gpus N or 0,1 leaves some to others.
--gpus @@{gpus}
#end
#if is_confined
# Root in the container gets none of root's rights, now or by another program, but to read and write mounted files whoever owns them. --user, where all of them are one user's, makes this one unnecessary too.
--security-opt no-new-privileges --cap-drop ALL --cap-add DAC_OVERRIDE
# Nothing in the image can be changed. Programs write to /tmp, from where the kernels that they compile are loaded (exec), and to the folders mounted below.
--read-only --tmpfs /tmp:exec,mode=1777 --env HOME=/tmp
#end
#if ipc_host
# The machine's own /dev/shm: half of its memory, unless it is mounted otherwise.
--ipc host
#else
# /dev/shm of @@{shm_size}: docker's default is 64 MiB, and @@{shm_users} end with a bus error when it is full. 1 GiB for each rank and 1 GiB for the server is an assumption.@@{shared_memory_why} Only the part that is used takes memory, and it is freed with the container.
--shm-size @@{shm_bytes}
#end
# Pinned memory for GPUs and network cards counts as locked, and the engine's threads take stacks of up to 64 MiB. NVIDIA asks for both options in its containers.
--ulimit memlock=-1 --ulimit stack=67108864
#if several_nodes
# The node's RDMA cards, without which NCCL and UCX fall back to TCP. TensorRT-LLM's guide takes --privileged, which gives the container the whole machine; the cards and the right to lock memory are what they use.
"${rdma[@]}"
#end
# Each connection and each mapped shard is a file.
--ulimit nofile=1048576:1048576
#if host_network
# The server listens at @@{ports} of the machine itself, @@{listens}.
--network host
#else
# The network of --network.
--network @@{network}
# What the server listens at is published on the machine, @@{listens}.
@@{published}
#end
# The folder, at the same path as here.
--mount @@{repository_mount}
#if checkpoint_mounts
# The checkpoint, at the path that the folder's files name.
--mount @@{checkpoint_mounts}
#end
#if hub
# The Hugging Face cache: @@{hub_names} is read from it, or downloaded into it.
--mount @@{hub_mount} --env @@{hub}
#if has_token
# The token for the download; docker takes its value from the environment.
--env HF_TOKEN
#end
#end
# Kernels that are compiled while it runs are kept, so that the next start of @@{comment_image} does not compile them again.
--mount @@{kernel_mount}
#if ready_mount
# The folder of --ready-file.
--mount @@{ready_mount}
#end
# Folders for the kernels of DeepGEMM (two of them), FlashInfer, vLLM, Triton, TileLang, CuTe DSL, PyTorch and the driver.
@@{kernel_variables}
# @@{script}'s variables.
@@{server_variables}
#if own_entrypoint
# In vLLM's images the entry point is its server, which would take the script for a model (vllm docker/Dockerfile@0000977e).
--entrypoint ''
#end
