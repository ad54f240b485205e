"""Several hosts on one machine: network namespaces with addresses of their own, for ``nox -s hosts``."""
