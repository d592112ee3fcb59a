"""The way in: tensors, parameters and JSON become a parsed request, and that becomes requests to the engine."""
