"""Lightning side of the kit: module, data, optimizer, callbacks."""
