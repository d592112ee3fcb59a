"""How a generated repository is started: on this machine, in a container, over several nodes, or on a cluster.

    launch_forms.py       the table of the forms, and recipes
    launch_settings.py    the options of the command line, who waits how long, and pairs of servers
    start_script.py       start.sh: its variables, the command that it runs, `launch local`
    containers.py         `launch docker`, and what other forms' containers share
    mpirun.py             `launch mpirun` and ssh-setup
    slurm.py, kubernetes.py    these forms, for one repository and for a pair

start.sh decides what runs; a form only sets its surroundings. Each form has the same functions:

    refusals              reasons why it can't be rendered
    unmet_requirements    what has to be there before the rendered text can run
    render                the text, which runs as it is
"""
