"""Names of operators, API calls and modules in the styles of torch, msprobe and ptdbg; patterns.

Imports ``record``.
"""
