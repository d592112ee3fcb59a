"""The plugin by which AIPerf measures our generate endpoints; AIPerf finds it by the entry point `aiperf.plugins`."""
