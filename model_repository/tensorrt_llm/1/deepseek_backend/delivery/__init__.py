"""The way out: steps of the engine wait in the step queue until the sender takes them to the clients."""
