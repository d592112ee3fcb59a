"""The `deepseek-triton` command line: main.py is the program, and each verb has a file of its name."""
