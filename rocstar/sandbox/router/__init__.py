"""Many sandboxes behind one face: a central queue, nodes that run the calls, and the wire between them."""
