"""What is sent: prompts of given lengths, files, traces, conversations."""
