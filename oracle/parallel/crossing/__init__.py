"""What stands around the forward of modules: rules on an edge, changes of layout, tensors inside what is passed."""
