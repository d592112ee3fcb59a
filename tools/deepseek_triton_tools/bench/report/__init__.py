"""Pictures: one HTML file, and the terminal."""
