"""The built-in plugins, written against rings 0 and 1 only, as a stranger's would be."""
