"""What tests share: servers, fakes, drivers and waiting."""
