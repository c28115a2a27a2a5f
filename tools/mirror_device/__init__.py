"""A PrivateUse1 device named `mirror`, whose memory is on the host: tests of devices that no machine here has."""
