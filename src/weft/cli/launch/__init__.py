"""Starting, restarting and ending ranks."""
