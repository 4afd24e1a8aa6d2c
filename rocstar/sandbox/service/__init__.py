"""The sandbox over HTTP: our own API, three dialects, and the gateway."""
