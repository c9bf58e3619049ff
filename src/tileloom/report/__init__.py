"""Pages that show what a run has found; nothing here runs a kernel."""
