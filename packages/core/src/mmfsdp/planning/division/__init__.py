"""How the rules of section `parallel` divide the modules of a model along the axis `tensor`."""
