"""tileloom inside other frameworks. Nothing is registered at import; each integration is a call."""
