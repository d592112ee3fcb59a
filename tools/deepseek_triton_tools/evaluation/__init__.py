"""The accuracy of a served model: lm-evaluation-harness over our client."""
