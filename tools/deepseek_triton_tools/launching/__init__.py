"""How a generated repository is started: on this machine, in a container, over several nodes, or on a cluster.

    launch_settings.py    the options of the command line
    start_script.py       start.sh: its variables, and the command that it runs
    containers.py         code for containers that docker, Slurm and ssh-setup share
    local.py, docker.py, mpirun.py, slurm.py, kubernetes.py    one file for each form
    launched_pair.py, slurm_pair.py, kubernetes_pair.py    a pair of context and generation servers
    ssh_setup.py          the script that lets mpirun reach the other nodes
    recipes.py            the scripts that build TensorRT-LLM from source

start.sh decides what runs; a form only sets its surroundings. Each form has the same functions:

    refusals              reasons why it can't be rendered
    unmet_requirements    what has to be there before the rendered text can run
    render                the text, which runs as it is
"""
