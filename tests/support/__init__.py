"""What tests stand on that is no test itself."""
