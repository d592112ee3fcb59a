"""Both clients and both protocols share this: requests, results, errors, settings and the calls themselves."""
