"""Probes: one module for each kind of device, each implementing `ergmeter.ports.Probe`."""
