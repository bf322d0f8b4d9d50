"""Reading devices: one module a kind of device, each behind `ergmeter.ports.Probe`."""
