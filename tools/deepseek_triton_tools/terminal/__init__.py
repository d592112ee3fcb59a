"""What people see: tables, text, a status line, and the lines they type."""
