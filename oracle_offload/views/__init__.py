"""What people see: terminal, pages, the summary, the timeline. No module here is needed to train."""
