"""Stand-ins for other packages, on the operators of this one."""
