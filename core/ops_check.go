package core

// Key and value sizes that the kernels are built for.
const maxHead = 512

// checkGDN holds the rules of Gated DeltaNet that no shape expresses.
func checkGDN(c *Call) error {
	if err := c.checkDelta(c.Int("gate") != 0); err != nil {
		return err
	}
	return c.checkTape()
}

// checkTape: what is opaque is a block of memory.
func (c *Call) checkTape() error {
	if tape := c.Tensor("tape"); tape.DType != None && tape.Stride[0] != 1 {
		return c.invalid("tape has strides %v, expected a contiguous tensor", tape.Stride[:1])
	}
	return nil
}

// checkDelta holds the rules of both families. needALog: the gate has no form without A_log.
func (c *Call) checkDelta(needALog bool) error {
	h, hv := c.Sizes[sizeH], c.Sizes[sizeHV]
	if err := c.inRange("q", "H", h, maxSize); err != nil {
		return err
	}
	if err := c.inRange("v", "HV", hv, maxSize); err != nil {
		return err
	}
	if err := c.inRange("q", "K", c.Sizes[sizeK], maxHead); err != nil {
		return err
	}
	if err := c.inRange("v", "V", c.Sizes[sizeV], maxHead); err != nil {
		return err
	}
	if hv%h != 0 {
		return c.invalid("v has HV=%d, expected a multiple of H=%d", hv, h)
	}
	gate := c.Int("gate") != 0
	switch {
	case gate && !c.Has("g"):
		return c.invalid("gate is 1 and g is NULL, expected the raw gate")
	case needALog && !c.Has("A_log"):
		return c.invalid("gate is 1 and A_log is NULL, expected [HV]")
	case !gate && c.Has("A_log"):
		return c.invalid("A_log is given and gate is 0, expected gate 1 with it")
	case !gate && c.Has("dt_bias"):
		return c.invalid("dt_bias is given and gate is 0, expected gate 1 with it")
	case c.Int("beta_sigmoid") != 0 && !c.Has("beta"):
		return c.invalid("beta_sigmoid is 1 and beta is NULL, expected the logits")
	case c.Int("neg_eigval") != 0 && c.Int("beta_sigmoid") == 0:
		return c.invalid("neg_eigval is 1 and beta_sigmoid is 0, expected beta_sigmoid 1 with it")
	}
	return nil
}

func (c *Call) inRange(tensor, letter string, n, most int64) error {
	if n < 1 || n > most {
		if most == maxSize {
			return c.invalid("%s has %s=%d, expected at least 1", tensor, letter, n)
		}
		return c.invalid("%s has %s=%d, expected 1 to %d", tensor, letter, n, most)
	}
	return nil
}
