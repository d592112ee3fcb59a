"""HTTP on loopback: as patient as a slow machine needs, without certificates to load, and with no connection kept open
(it would hold a server that exits)."""

import httpx

from support.waiting import PATIENCE_S

web = httpx.Client(timeout=PATIENCE_S, verify=False, trust_env=False, limits=httpx.Limits(max_keepalive_connections=0))
