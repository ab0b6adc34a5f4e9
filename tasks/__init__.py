"""The steps a driver is made of. Imports `apps`, never `workflows`."""
