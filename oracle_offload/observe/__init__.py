"""What people see: the terminal, pages, the summary, the timeline. Nothing here trains."""
