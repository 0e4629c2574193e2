package core

import "strings"

// Frame GDN, the linear attention of video models of the SANA family: one step of the recurrence a latent frame, not a token. With the
// frame's keys k_s, values v_s, strengths beta_s and its decay g, for each head:
//
//	W = g (Id - sum beta_s k_s k_s^T)     U = sum beta_s v_s k_s^T     S <- S W + U          numerator   S q
//	Wz likewise from the keys kz_s        uz = sum beta_s kz_s         z <- Wz z + uz        denominator z.q
//
// The scans take any W. In them B counts heads: [B H ...] of the build is [B*H ...] there.
var (
	argW  = TensorArg{Name: "W", Role: In, Rule: Io, Dims: "B T K K", Doc: "transition of each frame: S <- S W + U"}
	argWU = TensorArg{Name: "U", Role: In, Rule: Io, Dims: "B T V K", Doc: "what each frame adds"}
	argWz = TensorArg{Name: "Wz", Role: OptIn, Rule: Io, Dims: "B T K K", Doc: "transition of the denominator: z <- Wz z + uz; NULL: numerator only"}
	argUz = TensorArg{Name: "uz", Role: OptIn, Rule: Io, Dims: "B T K", Doc: "what each frame adds to z; comes with Wz"}
	argS0 = TensorArg{Name: "initial_state", Role: OptIn, Rule: Float, Dims: "B V K", Doc: "state before the scan's first frame; NULL: 0"}
	argZ0 = TensorArg{Name: "initial_z", Role: OptIn, Rule: Float, Dims: "B K", Doc: "z before the scan's first frame; NULL: 0"}
	argDS = TensorArg{Name: "dS", Role: OptIn, Rule: Float, Dims: "B T V K", Doc: "gradient of S; NULL: 0"}
	argDz = TensorArg{Name: "dz", Role: OptIn, Rule: Float, Dims: "B T K", Doc: "gradient of z; NULL: 0"}

	outDW  = TensorArg{Name: "dW", Role: Out, Rule: Same, Like: "W", Dims: "B T K K", Doc: "gradient of W"}
	outDU  = TensorArg{Name: "dU", Role: Out, Rule: Same, Like: "W", Dims: "B T V K", Doc: "gradient of U"}
	outDWz = TensorArg{Name: "dWz", Role: OptOut, Rule: Same, Like: "Wz", Dims: "B T K K", With: "Wz", Doc: "gradient of Wz"}
	outDuz = TensorArg{Name: "duz", Role: OptOut, Rule: Same, Like: "Wz", Dims: "B T K", With: "Wz", Doc: "gradient of uz"}

	numPadding   = NumberArg{Name: "padding", Max: maxSize, Doc: "how many frames at the end of T are padding, which leave the state as it is; what W, U, Wz and uz hold there is not read. The active length is T - padding"}
	numReverse   = NumberArg{Name: "reverse", Max: 1, Doc: "1: from the last frame to the first"}
	numExclusive = NumberArg{Name: "exclusive", Max: 1, Doc: "1: S and z of a frame are those before it, 0: after it"}
)

var frameFwd = &Op{
	Name: "frame_fwd",
	Doc:  "Frame GDN's scan: S <- S W + U and z <- Wz z + uz for each frame.",
	Tensors: []TensorArg{argW, argWU, argWz, argUz, argS0, argZ0,
		{Name: "S", Role: Out, Rule: Same, Like: "W", Dims: "B T V K", Doc: "states"},
		{Name: "z", Role: OptOut, Rule: Same, Like: "W", Dims: "B T K", With: "Wz", Doc: "z of each frame"},
		{Name: "final_state", Role: OptOut, Rule: Acc, Dims: "B V K", Want: "output_final_state", Doc: "state after the scan's last frame"},
		{Name: "final_z", Role: OptOut, Rule: Acc, Dims: "B K", With: "Wz", Want: "output_final_z", Doc: "z after the scan's last frame"},
	},
	Numbers: []NumberArg{numPadding, numReverse, numExclusive},
	Check:   checkFrame("Wz uz", "uz Wz", "initial_z Wz"),
}

var frameBwd = &Op{
	Name: "frame_bwd",
	Doc:  "Gradients of gdn_frame_fwd.",
	Tensors: []TensorArg{argW,
		{Name: "S", Role: In, Rule: Float, Dims: "B T V K", Doc: "as the forward of the same arguments wrote it"},
		{Name: "U", Role: OptIn, Rule: Io, Dims: "B T V K", Doc: "as in the forward: where S has 16 bits, the states are recomputed from it without their rounding"},
		argS0, argWz,
		{Name: "z", Role: OptIn, Rule: Float, Dims: "B T K", Doc: "as the forward wrote it; comes with Wz"},
		{Name: "uz", Role: OptIn, Rule: Io, Dims: "B T K", Doc: "as in the forward, for a z of 16 bits"},
		argZ0, argDS, argDz,
		{Name: "dfinal_state", Role: OptIn, Rule: Float, Dims: "B V K", Doc: "gradient of final_state; NULL: 0"},
		{Name: "dfinal_z", Role: OptIn, Rule: Float, Dims: "B K", Doc: "gradient of final_z; NULL: 0"},
		outDW, outDU, outDWz, outDuz,
		{Name: "dinitial_state", Role: OptOut, Rule: Acc, Dims: "B V K", With: "initial_state", Doc: "gradient of initial_state"},
		{Name: "dinitial_z", Role: OptOut, Rule: Acc, Dims: "B K", With: "initial_z", Doc: "gradient of initial_z"},
	},
	Numbers: []NumberArg{numPadding, numReverse, numExclusive},
	Check:   checkFrame("Wz z", "z Wz", "uz Wz", "initial_z Wz", "dz Wz", "dfinal_z Wz"),
}

var framePullback = &Op{
	Name: "frame_pullback",
	Doc:  "The gradient that gdn_frame_fwd sends to the state before its first frame, of S and z alone: what one part of a sequence owes the parts before it.",
	Tensors: []TensorArg{argW,
		{Name: "dS", Role: In, Rule: Float, Dims: "B T V K", Doc: "gradient of S"},
		argWz, argDz,
		{Name: "dinitial_state", Role: Out, Rule: Acc, Dims: "B V K", Doc: "gradient of the state before the first frame"},
		{Name: "dinitial_z", Role: OptOut, Rule: Acc, Dims: "B K", With: "Wz", Doc: "gradient of z before the first frame"},
	},
	Numbers: []NumberArg{numPadding, numReverse, numExclusive},
	Check:   checkFrame("dz Wz"),
}

var frameSummaryFwd = &Op{
	Name: "frame_summary_fwd",
	Doc:  "What all frames together do to a state, S <- S M + h and z <- Mz z + hz: the composite that one part of a sequence tells the others.",
	Tensors: []TensorArg{argW, argWU, argWz, argUz,
		{Name: "h", Role: Out, Rule: Acc, Dims: "B V K", Doc: "state after the frames from a state of 0"},
		{Name: "M", Role: OptOut, Rule: Acc, Dims: "B K K", Want: "output_M", Doc: "product of the W in the scan's order"},
		{Name: "hz", Role: OptOut, Rule: Acc, Dims: "B K", With: "Wz", Doc: "z after the frames from 0"},
		{Name: "Mz", Role: OptOut, Rule: Acc, Dims: "B K K", With: "Wz", Want: "output_Mz", Doc: "product of the Wz, the scan's first on the right"},
	},
	Numbers: []NumberArg{numPadding, numReverse},
	Check:   checkFrame("Wz uz", "uz Wz"),
}

var frameSummaryBwd = &Op{
	Name: "frame_summary_bwd",
	Doc:  "Gradients of gdn_frame_summary_fwd.",
	Tensors: []TensorArg{argW, argWU, argWz, argUz,
		{Name: "dh", Role: In, Rule: Float, Dims: "B V K", Doc: "gradient of h"},
		{Name: "dM", Role: OptIn, Rule: Float, Dims: "B K K", Doc: "gradient of M; NULL: 0"},
		{Name: "dhz", Role: OptIn, Rule: Float, Dims: "B K", Doc: "gradient of hz; NULL: 0"},
		{Name: "dMz", Role: OptIn, Rule: Float, Dims: "B K K", Doc: "gradient of Mz; NULL: 0"},
		outDW, outDU, outDWz, outDuz,
	},
	Numbers: []NumberArg{numPadding, numReverse},
	Check:   checkFrame("Wz uz", "uz Wz", "dhz Wz", "dMz Wz"),
}

// The composites of T parts, outermost as gathered.
var (
	argM  = TensorArg{Name: "M", Role: In, Rule: Io, Dims: "T B K K", Doc: "composite transition of each part"}
	argMz = TensorArg{Name: "Mz", Role: OptIn, Rule: Io, Dims: "T B K K", Doc: "that of z; NULL: numerator only"}
)

var frameMergeFwd = &Op{
	Name: "frame_merge_fwd",
	Doc:  "The states after each of T parts of a sequence, from their composites: S <- S M + h and z <- Mz z + hz. Where a state is 0, M counts for nothing, whatever it holds.",
	Tensors: []TensorArg{argM,
		{Name: "h", Role: In, Rule: Io, Dims: "T B V K", Doc: "state of each part from a state of 0"},
		argMz,
		{Name: "hz", Role: OptIn, Rule: Io, Dims: "T B K", Doc: "z of each part from 0; comes with Mz"},
		argS0, argZ0,
		{Name: "S", Role: Out, Rule: Acc, Dims: "T B V K", Doc: "state after each part"},
		{Name: "z", Role: OptOut, Rule: Acc, Dims: "T B K", With: "Mz", Doc: "z after each part"},
	},
	Numbers: []NumberArg{numReverse},
	Check:   checkFrame("Mz hz", "hz Mz", "initial_z Mz"),
}

var frameMergeBwd = &Op{
	Name: "frame_merge_bwd",
	Doc:  "Gradients of gdn_frame_merge_fwd.",
	Tensors: []TensorArg{argM,
		{Name: "S", Role: In, Rule: Float, Dims: "T B V K", Doc: "as the forward wrote it"},
		argS0, argMz,
		{Name: "z", Role: OptIn, Rule: Float, Dims: "T B K", Doc: "as the forward wrote it; comes with Mz"},
		argZ0,
		{Name: "dS", Role: OptIn, Rule: Float, Dims: "T B V K", Doc: "gradient of S; NULL: 0"},
		{Name: "dz", Role: OptIn, Rule: Float, Dims: "T B K", Doc: "gradient of z; NULL: 0"},
		{Name: "dM", Role: Out, Rule: Same, Like: "M", Dims: "T B K K", Doc: "gradient of M"},
		{Name: "dh", Role: Out, Rule: Same, Like: "M", Dims: "T B V K", Doc: "gradient of h"},
		{Name: "dMz", Role: OptOut, Rule: Same, Like: "Mz", Dims: "T B K K", With: "Mz", Doc: "gradient of Mz"},
		{Name: "dhz", Role: OptOut, Rule: Same, Like: "Mz", Dims: "T B K", With: "Mz", Doc: "gradient of hz"},
		{Name: "dinitial_state", Role: OptOut, Rule: Acc, Dims: "B V K", With: "initial_state", Doc: "gradient of initial_state"},
		{Name: "dinitial_z", Role: OptOut, Rule: Acc, Dims: "B K", With: "initial_z", Doc: "gradient of initial_z"},
	},
	Numbers: []NumberArg{numReverse},
	Check:   checkFrame("Mz z", "z Mz", "initial_z Mz", "dz Mz"),
}

// Tokens of the frames: R a frame.
var (
	argFK    = TensorArg{Name: "k", Role: In, Rule: Io, Dims: "B T R H K", Doc: "keys, R tokens a frame"}
	argFV    = TensorArg{Name: "v", Role: In, Rule: Io, Dims: "B T R H V", Doc: "values"}
	argFBeta = TensorArg{Name: "beta", Role: In, Rule: Float, Dims: "B T R H", Doc: "write strength of each token"}
	argDecay = TensorArg{Name: "decay", Role: In, Rule: Float, Dims: "B T H", Doc: "factor of the old state, 0 to 1; 0 is a reset"}
	argKz    = TensorArg{Name: "kz", Role: OptIn, Rule: Io, Dims: "B T R H K", Doc: "keys of the denominator; NULL: numerator only"}
	argFQ    = TensorArg{Name: "q", Role: In, Rule: Io, Dims: "B T R H K", Doc: "queries"}
	argFS    = TensorArg{Name: "S", Role: In, Rule: Float, Dims: "B H T V K", Doc: "states"}
	argQz    = TensorArg{Name: "qz", Role: OptIn, Rule: Io, Dims: "B T R H K", Doc: "queries of the denominator; NULL: numerator only"}
	argFz    = TensorArg{Name: "z", Role: OptIn, Rule: Float, Dims: "B H T K", Doc: "z of each frame; comes with qz"}
)

var frameBuildFwd = &Op{
	Name: "frame_build_fwd",
	Doc:  "Frame GDN's transitions: W = decay (Id - sum beta k k^T), U = sum beta v k^T, and Wz, uz = sum beta kz from the keys kz, sums over a frame's tokens. W and Wz are symmetric in every bit.",
	Tensors: []TensorArg{argFK, argFV, argFBeta, argDecay, argKz,
		{Name: "W", Role: Out, Rule: Acc, Dims: "B H T K K", Doc: "transition of each frame"},
		{Name: "U", Role: Out, Rule: Acc, Dims: "B H T V K", Doc: "what each frame adds"},
		{Name: "Wz", Role: OptOut, Rule: Acc, Dims: "B H T K K", With: "kz", Doc: "transition of the denominator"},
		{Name: "uz", Role: OptOut, Rule: Acc, Dims: "B H T K", With: "kz", Doc: "what each frame adds to z"},
	},
	Check: checkFrame(),
}

var frameBuildBwd = &Op{
	Name: "frame_build_bwd",
	Doc:  "Gradients of gdn_frame_build_fwd.",
	Tensors: []TensorArg{argFK, argFV, argFBeta, argDecay, argKz,
		{Name: "dW", Role: In, Rule: Float, Dims: "B H T K K", Doc: "gradient of W"},
		{Name: "dU", Role: In, Rule: Float, Dims: "B H T V K", Doc: "gradient of U"},
		{Name: "dWz", Role: OptIn, Rule: Float, Dims: "B H T K K", Doc: "gradient of Wz; NULL: 0"},
		{Name: "duz", Role: OptIn, Rule: Float, Dims: "B H T K", Doc: "gradient of uz; NULL: 0"},
		{Name: "dk", Role: Out, Rule: Same, Like: "k", Dims: "B T R H K", Doc: "gradient of k"},
		{Name: "dv", Role: Out, Rule: Same, Like: "v", Dims: "B T R H V", Doc: "gradient of v"},
		{Name: "dbeta", Role: Out, Rule: Same, Like: "beta", Dims: "B T R H", Doc: "gradient of beta"},
		{Name: "ddecay", Role: Out, Rule: Same, Like: "decay", Dims: "B T H", Doc: "gradient of decay"},
		{Name: "dkz", Role: OptOut, Rule: Same, Like: "kz", Dims: "B T R H K", With: "kz", Doc: "gradient of kz"},
	},
	Check: checkFrame("dWz kz", "duz kz"),
}

var frameProjectFwd = &Op{
	Name: "frame_project_fwd",
	Doc:  "What the tokens of each frame read: num = S q and den = z.qz.",
	Tensors: []TensorArg{argFQ, argFS, argQz, argFz,
		{Name: "num", Role: Out, Rule: Same, Like: "q", Dims: "B T R H V", Doc: "numerator"},
		{Name: "den", Role: OptOut, Rule: Acc, Dims: "B T R H", With: "qz", Doc: "denominator"},
	},
	Check: checkFrame("qz z", "z qz"),
}

var frameProjectBwd = &Op{
	Name: "frame_project_bwd",
	Doc:  "Gradients of gdn_frame_project_fwd.",
	Tensors: []TensorArg{argFQ, argFS, argQz, argFz,
		{Name: "dnum", Role: In, Rule: Float, Dims: "B T R H V", Doc: "gradient of num"},
		{Name: "dden", Role: OptIn, Rule: Float, Dims: "B T R H", Doc: "gradient of den; NULL: 0"},
		{Name: "dq", Role: Out, Rule: Same, Like: "q", Dims: "B T R H K", Doc: "gradient of q"},
		{Name: "dS", Role: Out, Rule: Same, Like: "S", Dims: "B H T V K", Doc: "gradient of S"},
		{Name: "dqz", Role: OptOut, Rule: Same, Like: "qz", Dims: "B T R H K", With: "qz", Doc: "gradient of qz"},
		{Name: "dz", Role: OptOut, Rule: Same, Like: "z", Dims: "B H T K", With: "z", Doc: "gradient of z"},
	},
	Check: checkFrame("qz z", "z qz", "dden qz"),
}

var frameOps = []*Op{frameFwd, frameBwd, framePullback, frameSummaryFwd, frameSummaryBwd, frameMergeFwd, frameMergeBwd, frameBuildFwd, frameBuildBwd,
	frameProjectFwd, frameProjectBwd}

// checkFrame makes the check of an operator: sizes, padding, and inputs that need another, "a b" where a needs b.
func checkFrame(needs ...string) func(*Call) error {
	return func(c *Call) error {
		if err := c.inRange(c.Op.Tensors[0].Name, "K", c.Sizes[sizeK], maxHead); err != nil {
			return err
		}
		if err := c.inRange(c.Op.Tensors[1].Name, "V", c.Sizes[sizeV], maxHead); err != nil {
			return err
		}
		for _, pair := range needs {
			if a, b, _ := strings.Cut(pair, " "); c.Has(a) && !c.Has(b) {
				return c.invalid("%s is given without %s", a, b)
			}
		}
		for i := range c.Op.Numbers {
			if n := c.Ints[i]; c.Op.Numbers[i].Name == "padding" && n > c.Sizes[sizeT] {
				return c.invalid("padding is %d, expected at most T=%d", n, c.Sizes[sizeT])
			}
		}
		return nil
	}
}
