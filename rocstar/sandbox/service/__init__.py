"""The sandbox over HTTP: `rocstar sandbox serve`. Its own native API, and thin views of it that other clients speak."""
