"""The way out: engines leave steps in the step queue, and delivery's threads take them to the clients."""
