"""The way in: tensors, parameters and JSON become a parsed request, and that what engines take."""
