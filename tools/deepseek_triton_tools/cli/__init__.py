"""The command line: `main` builds the parser, and each verb has a file with its options and its handler."""
