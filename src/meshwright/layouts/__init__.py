"""Where arrays lie, as values: mesh, layout, layout map, dim names and rules, placement."""
