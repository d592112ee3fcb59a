"""Planning to an SLA: the layout that serves most tokens within limits on TTFT and TPOT, or a rate on the fewest GPUs.

paces.py           layouts of a server, and how long their iterations take
-> fleets.py       which of them our rules and the memory allow, the fleets for the GPUs or the rate, and their times
-> sla_plan.py     all of it, what `build` makes of the best, and what is shown
"""

import sys

from deepseek_triton_build import version_dir

# The backend travels as files of a model repository, not as a package. Its
# simulated engine has the arithmetic of paces.
if str(version_dir()) not in sys.path:
    sys.path.append(str(version_dir()))
