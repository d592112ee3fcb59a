"""What both clients and both protocols share: requests, results, errors, settings and the calls themselves."""
