"""How it is sent: at which pace, to which kind of server, by which processes."""
