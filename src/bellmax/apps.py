"""The former package of the applications, which tells where they are now."""

raise ImportError(
    "bellmax.apps is now the distribution bellmax-apps: import bellmax_apps (pip install bellmax-apps, or in a clone "
    "pip install ./apps)"
)
