"""How a generated repository is started: on this machine, in a container, over several nodes, on a cluster.

    facts.py        what a repository needs of where it runs
    options.py      what the command line says
    script.py       start.sh: its variables, and the command that it comes to
    local.py, docker.py, mpirun.py, slurm.py, kubernetes.py    a form each: render(facts, options) and what it can't do
    ssh_setup.py    what has to be there before mpirun can reach the other nodes
    recipes.py      TensorRT-LLM from source

start.sh says what runs; here are only its surroundings. Every form renders a text that runs as it is.
"""
